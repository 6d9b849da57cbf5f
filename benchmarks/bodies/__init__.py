"""Human bodies by the package `anny`: the built-in sets, and the sets from which the networks in the wheel learn."""
