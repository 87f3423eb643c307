"""What a robot policy carries with its weights: conventions, statistics, pre- and post-processing."""
