"""Kernels with a reference in plain torch, and what each kind of hardware puts in its place."""
