"""Demonstrations: a scripted expert plays in a simulator, and a LeRobot dataset with videos comes of it."""
