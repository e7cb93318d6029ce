"""Images and text to the token ids and tiles that a model reads, by the layout of its checkpoint format."""
