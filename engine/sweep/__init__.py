"""`--multirun`: sets of runs, each in processes of its own."""
