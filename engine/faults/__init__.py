"""When things go wrong while a run goes on: who it was, where, and what is done about it."""
