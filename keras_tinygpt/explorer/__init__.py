"""A page in the browser that shows a trained model at work, for `tinygpt explore`."""
