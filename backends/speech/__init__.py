"""Speech: text to audio (`Speaker`) and audio to text (`Transcriber`), by engines or libraries."""
