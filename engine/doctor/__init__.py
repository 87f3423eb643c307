"""`zoo doctor`: whether this machine can run Zooforge, and what would make it better."""
