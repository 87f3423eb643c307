raise ImportError("a family's one import name is zoo.<family>; 'zoo.llm' is only the shelf it stands on")
