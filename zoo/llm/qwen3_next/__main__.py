from engine.cli import main

main("qwen3_next")
