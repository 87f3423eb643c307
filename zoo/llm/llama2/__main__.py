from engine.cli import main

main("llama2")
