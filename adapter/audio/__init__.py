"""Speech in requests and responses: voices, sentences, audio formats, spoken answers."""
