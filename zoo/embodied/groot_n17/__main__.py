from engine.cli import main

main("groot_n17")
