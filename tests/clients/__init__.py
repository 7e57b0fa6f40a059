"""Real clients, each in its own environment, against a real server: `python -m tests.clients`.

What a client gets is compared with what plain HTTP gets. `drivers/` holds one script per client, run by the client's
own interpreter: those import the standard library, their client, `drivers/checking.py` and `drivers/questions.py`.
"""
