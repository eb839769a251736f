"""Pure functions from (key, tokens) to inputs and targets, run on the device inside the jitted step."""
