minifloat: error: /tmp/dt/out/F32-self: no such folder; download the model first (`hf download ORG/NAME --local-dir FOLDER`)
