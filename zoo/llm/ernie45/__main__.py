from engine.cli import main

main("ernie45")
