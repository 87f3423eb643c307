"""CALVIN (Mees et al. 2022): five instructions in a row, in a scene that is not reset between them."""
