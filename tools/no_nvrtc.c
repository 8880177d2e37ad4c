// An NVRTC that compiles nothing: a program's PTX is its source. For drivers that run nothing (`CUDA_INTERPRETER_LIST`).
#include <stdlib.h>
#include <string.h>

typedef char *Program;

int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
int nvrtcCreateProgram(Program *program, const char *source, const char *name, int headers, const char **texts, const char **names) {
    *program = strdup(source);
    return *program == NULL;
}
int nvrtcCompileProgram(Program program, int options, const char **texts) { return 0; }
int nvrtcGetPTXSize(Program program, size_t *size) { *size = strlen(program) + 1; return 0; }
int nvrtcGetPTX(Program program, char *ptx) { strcpy(ptx, program); return 0; }
int nvrtcDestroyProgram(Program *program) { free(*program); *program = NULL; return 0; }
