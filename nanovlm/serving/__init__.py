"""The server: OpenAI's chat completions, streamed or not, and a page to ask by hand; extra `serve`.

engine     one thread that owns the model; requests join and leave its batch between two tokens
protocol   what is asked and what is said, as the OpenAI client library speaks it
pictures   data URLs, and remote ones where they are allowed
answering  from messages to what the model reads, from its tokens to text
desk       how many may ask, how much and how long; and their answers
guard      who may ask at all
metrics    what Prometheus reads
app        the routes; running starts them and ends them
"""
