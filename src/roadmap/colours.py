"""Of the colours that pretrained networks expect: mean and standard deviation of ImageNet's, in units of [0, 1]."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
