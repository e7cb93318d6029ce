"""The server: OpenAI's chat completions with continuous batching, and a web page. Needs the extra `serve`.

server       starts and stops: uvicorn, signals, draining
app          the routes; security: host names, origins and the API key
service      takes a request through all of the following
options      where it listens, whom it serves and how much it accepts
admission    a place for each request, its body, deadlines and disconnects
protocol     OpenAI's requests; response_formats: OpenAI's responses; errors: OpenAI's errors
image_urls   data URLs and remote images; chat_format: messages to model inputs
engine       the thread that owns the model and its continuous batch
streaming    tokens to text, stop strings and server-sent events
"""
