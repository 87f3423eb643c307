"""Mixtures of experts: what both backends share."""
