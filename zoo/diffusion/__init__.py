raise ImportError("a family's one import name is zoo.<family>; 'zoo.diffusion' is only the shelf it stands on")
