"""The options of each task, and its changes to the recipes. The command line reads them, so they load fast."""
