"""The server: OpenAI's chat completions with continuous batching, and a web page. Needs the extra `serve`.

app          routes, who may use them, and the way of a request from its body to its response
openai_api   what a request may hold; the JSON of responses and errors
engine       the thread that steps the continuous batch
options      the flags of `nanovlm serve`
"""
