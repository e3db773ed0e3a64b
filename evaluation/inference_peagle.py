from evaluation.inference.command import inference_command

inference_command(__name__, __file__)
