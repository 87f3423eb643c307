"""What families of decoder-only language models share. Free of torch."""
