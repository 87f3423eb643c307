"""What GR00T policies share: the action head, robots' own layers, the processor, and the config keys of all that."""
