"""`zoo parity A B`: whether two machines, backends or layouts compute the same."""
