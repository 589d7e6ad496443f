# told: none of the notebook's names
# what stays free is computed by a function of the notebook
def run_1024():
    layout = {"tp": 4, "cp": 2, "pp": 2, "v": 20, "micro": 2, "zero": 2, "recompute": "none"}
    told = plan_of(**layout)
    return {**layout, "left": (told.cluster.usable - told.bytes) / 2**30, "largest": told.blame}
