"""Low-rank adaptation (Hu et al., arXiv 2106.09685): frozen weights W, and beside each W a trained (alpha / r) B A."""
