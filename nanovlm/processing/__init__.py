"""Images and text to the token ids and tiles that a model reads, by the layout of its checkpoint format."""

VIDEO_EXTENSIONS = {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv"}
ANIMATION_EXTENSIONS = {".gif", ".webp"}
MAX_FRAMES = 8  # of a video, by default; 64 frames, as transformers takes, are minutes of work for a CPU
