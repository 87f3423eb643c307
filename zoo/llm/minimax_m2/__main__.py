from engine.cli import main

main("minimax_m2")
