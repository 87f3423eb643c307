"""Conversations as training data: chat files in, rendered and masked token ids out."""
