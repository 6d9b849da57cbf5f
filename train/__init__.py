"""Training, prediction, reports and the command line. Import from the modules; this file loads none of them."""
