from engine.cli import main

main("pi05")
