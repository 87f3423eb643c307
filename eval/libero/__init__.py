"""LIBERO (Liu et al. 2023): five suites of household tasks for a Panda arm."""
