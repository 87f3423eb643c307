from engine.cli import main

main("kimi_k2")
