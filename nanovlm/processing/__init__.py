"""Images and text to the token ids and tiles that a model reads, by the layout of its checkpoint format."""

VIDEO_EXTENSIONS = {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv"}
