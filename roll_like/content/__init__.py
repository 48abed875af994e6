"""What rows, tools and observations hold: the pixels of images, the characters of texts."""
