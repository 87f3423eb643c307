"""A point that is to reach a goal: a benchmark without a simulator, to try a server and a setup out in seconds."""
