from engine.cli import main

main("glm5")
