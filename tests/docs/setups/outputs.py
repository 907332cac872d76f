def outputs(p, x):
    return x @ p["w"]
