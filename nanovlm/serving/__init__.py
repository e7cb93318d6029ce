"""The server: OpenAI's chat completions with continuous batching, and a web page. Needs the extra `serve`.

app          routes, and the way of a request from its body to its response
openai_api   what a request may hold; the JSON of responses
web          who may use a server, bodies, files of pages, errors and the port; for `nanovlm.review`, too
engine       the thread that steps the continuous batch
options      the flags of `nanovlm serve`
"""
