"""An OpenAI-compatible server over the embedded engine. An event loop talks to clients, and one thread runs the engine.

asks.py      what a client asks for, or why it is refused
worker.py    the engine's thread: takes requests, tells what comes of them
calls.py     one request of a client: its samples, their texts, its end
answers.py   the JSON that clients get
app.py       addresses, keys, limits, streams
"""
