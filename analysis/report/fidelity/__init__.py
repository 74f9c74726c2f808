"""Tables, figures and sentences of a calibration or of the main job."""
