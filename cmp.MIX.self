minifloat: error: a.txt: no such file or folder
