"""Looking inside a run: where its time and memory go, and what passes through its layers."""
