raise ImportError("a family's one import name is zoo.<family>; 'zoo.vlm' is only the shelf it stands on")
