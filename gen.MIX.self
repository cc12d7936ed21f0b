minifloat: error: /tmp/dt/out/MIX-self: no such folder; download the model first (`hf download ORG/NAME --local-dir FOLDER`)
