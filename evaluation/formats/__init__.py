"""Other people's formats of acceptance and answers: written from answer files, and read."""
