"""What a kernel may say: attacks on its text are refused with their line, valid CUDA is read as a compiler reads it."""

from __future__ import annotations

import pytest

from labkit.cuda_lex import words
from labkit.cuda_text import CompileError, explained, parsed, translated

KERNEL = "__global__ void k(const float* x, float* y, int n, float by)"

# body of a function -> words of the refusal. Each would reach a compiler, the lab's counts or another file.
INSIDE = {
    'asm("nop");': "no assembly",
    '__asm__ volatile("nop");': "no assembly",
    "as\\\nm(0);": "no assembly",
    "int a = 1'000; asm(0); int b = 1'000;": "no assembly",
    "#define A as\n#define B m\nA##B(0);": "`##` stands in the middle",
    "#define J(a, b) a##b\nJ(as, m)(0);": "no `##` in a macro",
    "#define S(a) #a\nprintf(S(x));": "no `#` in a macro",
    "#define ASM asm\nASM(0);": "no assembly",
    "??=include <x>": "in place of `??=`",
    '%:include "/etc/passwd"': "in place of `%:`",
    '#include "/etc/passwd"': "may begin with #",
    '#import "/etc/passwd"': "may begin with #",
    "#if 1\n#endif": "may begin with #",
    "#line 7": "may begin with #",
    "#pragma GCC poison x": "may begin with #",
    '_Pragma("once");': "there is no such function",
    'R"(";asm(0);//)";': "no raw string",
    'auto s = "asm";': "a string stands in printf only",
    "char c = 'a';": "no character",
    "int a = 1'; asm(0); int b = 1';": "no character",
    "int \\u0061sm = 1;": "no backslash",
    "int \u00e4 = 1;": "is written in ASCII",
    "lab::L.limit = 0;": "a name with :: belongs to the lab",
    "::lab::L.limit = 0;": "a name with :: belongs to the lab",
    "emulator::S.order = 0;": "a name with :: belongs to the lab",
    "me::x;": "a name with :: belongs to the lab",
    "using namespace lab;": "expected an expression",
    "namespace q = lab;": "no namespace",
    "__builtin_trap();": "there is no such function",
    'system("id");': "there is no such function",
    'fopen("/etc/passwd", "r");': "there is no such function",
    "std::system(0);": "of std:: a kernel has min, max",
    "auto f = []() { return 1; };": "no lambdas",
    "void (*f)(int) = 0;": "expected `;`",
    "auto f = helper; f(1);": "a function is called",
    "auto f = &helper;": "a function is called",
    "int a; int* p = &a;": "an address is taken of an element",
    "float* p = (float*)&x;": "an address is taken of an element",
    "char* p = (char*)x;": "a pointer to char",
    "float** p;": "a pointer to a pointer",
    "float (&r)[4] = a;": "an address is taken of an element",
    'printf("??/");': "without ??",
    'printf("\\x41");': "a string is of ASCII",
    "void* p = x;": "a pointer to void",
    "float* p = new float;": "no new",
    "union { int i; float f; } u;": "no union",
    "class C { };": "no class",
    "goto end; end: ;": "no goto",
    "static int n = 0;": "no static variables",
    "thread_local int n = 0;": "no thread_local",
    "volatile int n = 0;": "volatile does not order threads",
    "decltype(x) p;": "no decltype",
    "try { } catch (...) { }": "no exceptions",
    "extern __shared__ float s[];": "no extern",
    "__shared__ float* s[4];": "shared memory is",
    "__shared__ int s = 1;": "shared memory begins with no value",
    "float* p = const_cast<float*>(x);": "no const_cast",
    "float v = reinterpret_cast<float>(n);": "reinterpret_cast is for pointers",
    "[[gnu::alias]] int n;": "no lambdas",
    "int n __attribute__((section(0)));": "no attributes",
    'printf("%d" "%s", 1, x, ': "expected an expression",
    "int a[n;": "expected `]`",
    "((((((": "expected an expression",
    "float operator+(float a);": "no operators",
    "float v = 1.2.3;": "this is no number",
    "float v = 08zz;": "this is no number",
}
# the whole of what stands before the kernel
BEFORE = {
    "int global = 0;": "outside of functions there are constants only",
    "__device__ float total;": "outside of functions there are constants only",
    "struct S { S() { } };": "expected a type",
    "struct S { static int n; };": "a struct has plain members",
    "struct S { float operator()(int i); };": "no operators",
    "struct S { float x; }; void f() { { int S; } S * p; }": "the name of a type already",
    "struct S : float4 { };": "expected `{`",
    "class S { };": "no class",
    "namespace lab { int x; }": "no namespace",
    "inline namespace lab { }": "no namespace",
    "using namespace lab;": "no namespace",
    "template <class T> struct Counted { };": "no template of a struct",
    "template <template <class> class T> void f() { }": "a template stands",
    "float operator+(float4 a, float4 b) { return 0; }": "no operators",
    'extern "C" void f();': "no extern",
    "__attribute__((constructor)) void f() { }": "no attributes",
    "[[gnu::constructor]] void f() { }": "expected a function",
    "float& f() { }": "a function returns a value",
    "void f(float (*g)(float)) { }": "expected a name",
    "void f(float* & p) { }": "a reference here is to a value",
    "void f(float a[4][4]) { }": "an array that is passed has one size",
    "__constant__ float c[4];": "no __constant__",
    "enum { N = 4 };": "no enum",
    "typedef float (*F)(float);": "expected a name",
    "using F = float(*)(float);": "expected `;`",
    "static_assert(1);": "no static_assert",
    "template <class T> __global__ void k2(T* x) { }": "and no template",
    "__global__ void second(float* y) { }": "one `__global__ void` is wanted, there are 2",
    "#define F(x) F F F F F F F F\n" * 2 + "void f() { int F; }\n#define G(a, a) a": "names between commas",
    "#define A0 1+1\n" + "".join(f"#define A{i} A{i - 1}+A{i - 1}\n" for i in range(1, 30)) + "constexpr int a = A29;":
        "makes too many words",
    "#define A0\n" + "".join(f"#define A{i} A{i - 1} A{i - 1}\n" for i in range(1, 30)) + "A29 constexpr int a = 1;":
        "makes too many words",
}  # fmt: skip


def text_of(inside: str = "", before: str = "") -> str:
    helper = "__device__ int helper(int a) { return a; }\n"
    return f"\n{before}\n{helper}{KERNEL} {{\n{inside}\n}}\n"


@pytest.mark.parametrize("inside", INSIDE)
def test_what_a_kernel_has_no_use_for_is_refused_with_its_line(inside: str) -> None:
    with pytest.raises(CompileError) as error:
        parsed(text_of(inside), 10)
    assert INSIDE[inside] in error.value.what
    assert 14 <= error.value.line <= 18


@pytest.mark.parametrize("before", BEFORE)
def test_outside_of_functions_there_are_functions_and_constants(before: str) -> None:
    with pytest.raises(CompileError) as error:
        parsed(text_of(before=before), 10)
    assert BEFORE[before] in error.value.what
    assert error.value.line >= 10


def test_each_name_of_a_text_is_one_of_its_own() -> None:
    """Nothing that a learner writes can name what is in the lab's header."""
    code = parsed(text_of("int S = 0, lab = n, emulator = S, Counted = lab; y[Counted] = __builtin; "), 1).code
    for name in ("S", "lab", "emulator", "Counted", "__builtin"):
        assert f"me_{name}" in code
    assert "Counted;" not in code.replace("me_Counted;", "")


def test_the_words_are_those_of_a_compiler() -> None:
    text = '#define SQ(v) ((v) * (v))\n#define N 4\nSQ(a + N) 1\'0 /* x\n */ b\\\nc // d\n"//" <<= N2 0x1p3f'
    found = [(word.text, word.line) for word in words(text, 5)]
    assert " ".join(text for text, _ in found) == '( ( a + 4 ) * ( a + 4 ) ) 10 bc "//" <<= N2 0x1p3f '
    assert dict(found)["bc"] == 8 and dict(found)["<<="] == 10 and dict(found)["10"] == 7


def test_a_macro_is_expanded_once_and_may_stand_for_words_that_look_like_its_own() -> None:
    assert [w.text for w in words("#define a b + a\n#define b a\na", 1)] == ["a", "+", "a", ""]
    assert [w.text for w in words("#define f(x) x\n#define g (1)\nf f(f(2)) g\n#undef g\ng", 1)] == [
        "f", "2", "(", "1", ")", "g", ""]  # fmt: skip


def test_lines_stay_where_they_were() -> None:
    code = translated(text_of("int a = 0;\n\n\ny[a] = 1;"), 10, on_gpu=False)
    lines = code[code.index('#line 10 "kernel"') :].splitlines()
    assert "me_a = " in lines[5] and "me_y[" in lines[8] and "Place{17," in lines[8]


def test_the_compilers_words_are_told_in_the_learners_names() -> None:
    said = "refused\nkernel:7:3: error: cannot convert ‘lab::Counted<float>’ to ‘float’ in ‘me_sum’"
    error = explained(said)
    assert error.line == 7 and error.what.endswith("cannot convert `float*` to `float` in `sum`")
