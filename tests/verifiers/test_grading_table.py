"""The score of every verifier, row by row.

The rows are verl's T10, LUFFY's T11, Classmate's 8.10, BuPO's invariant 22, cs336's lists, the
answer formats of each data set, and near misses. Where a reference differs, the row says how and
why.
"""

import json
from collections import Counter

import pytest

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.table import VERIFIERS

TAGS = "t </think> <answer>{}</answer>"

# (verifier, response, ground truth, expected value)
TABLE: list[tuple[str, str, str, float]] = [
    # ---- gsm8k, strict: verl's T10. It compares strings; we compare numbers.
    ("gsm8k_strict", "#### 1,234", "1234", 1),
    ("gsm8k_strict", "#### 42.", "42", 1),  # verl 0: the full stop
    ("gsm8k_strict", "#### $42", "42", 1),  # verl 0: the currency
    ("gsm8k_strict", "####42", "42", 1),  # verl 0: the missing space
    ("gsm8k_strict", "#### 42.0", "42", 1),  # verl 0: text, not numbers
    ("gsm8k_strict", "#### 42" + " " * 300, "42", 1),  # verl 0: it looks at the last 300 characters
    ("gsm8k_strict", "#### 41 and then #### 42", "42", 1),
    ("gsm8k_strict", "#### 42 and then #### 41", "42", 0),
    ("gsm8k_strict", "so it is 42", "42", 0),
    ("gsm8k_strict", "#### forty-two", "42", 0),
    ("gsm8k_strict", "#### 43", "42", 0),
    ("gsm8k_strict", "#### -42", "42", 0),
    ("gsm8k_strict", "#### 4.2", "42", 0),
    (
        "gsm8k_strict",
        "#### 42",
        "Natalia sold 48/2 = 24.\n#### 42",
        1,
    ),  # the whole solution as ground truth
    ("gsm8k_strict", "", "42", 0),
    # flexible: the last number
    ("gsm8k_flexible", "#### 1,234", "1234", 1),  # verl 0: commas kept
    ("gsm8k_flexible", "#### $42", "42", 1),
    ("gsm8k_flexible", "####42", "42", 1),
    (
        "gsm8k_flexible",
        "the answer is -5",
        "-5",
        1,
    ),  # Classmate 8.10 reads 5: the sign is lost there
    ("gsm8k_flexible", "the answer is -5", "5", 0),
    ("gsm8k_flexible", "the answer is 1,234,567", "1234567", 1),
    ("gsm8k_flexible", "48 + 24 = 72 clips", "72", 1),
    ("gsm8k_flexible", "she has 72, which is 3 more", "72", 0),
    ("gsm8k_flexible", "it is $18.90.", "18.9", 1),
    ("gsm8k_flexible", "no number at all", "72", 0),
    ("gsm8k_flexible", "10 - 5", "-5", 0),  # a subtraction, not a sign
    ("gsm8k_flexible", "0.5", "1/2", 1),
    # both: the marker where there is one
    ("gsm8k", "#### 42 (that is 6 times 7)", "42", 1),
    ("gsm8k", "it is 42 clips.", "42", 1),
    ("gsm8k", "#### 41\nso 42", "42", 0),
    (
        "gsm8k",
        "\\boxed{42} in 3 days",
        "42",
        1,
    ),  # Classmate's prompt asks for a box, its grader takes the 3
    ("gsm8k", "\\boxed{\\$1,042.50\\text{ dollars}}", "1042.5", 1),
    ("gsm8k", "\\boxed{43} and not 42", "42", 0),
    ("gsm8k", "The profit is $70,000.", "70000", 1),
    ("gsm8k", "75%", "75", 1),
    ("numeric", "3/4", "0.75", 1),
    ("numeric", "it is 5e3", "5000", 1),
    ("numeric", "it is 5e3", "3", 0),
    ("numeric", "about 1.5e-3", "0.0015", 1),
    ("gsm8k", "#### 1e3", "1000", 1),
    ("gsm8k_strict", "#### 1e3", "1", 0),
    ("numeric", "1234 of 5", "1234", 0),
    ("exact", " 590\n", "590", 1),
    ("exact", "0590", "590", 0),
    ("exact", "590.", "590", 0),
    # ---- MATH by text: verl's T10 and BuPO's invariant 22
    ("boxed", "\\boxed{\\frac12}", "\\frac{1}{2}", 1),
    ("boxed", "\\boxed{0.5}", "\\frac{1}{2}", 1),
    ("boxed", "\\boxed{x=5}", "5", 1),
    ("boxed", "\\boxed{1,000}", "1000", 1),  # verl 0: thousands are no list
    ("boxed", "\\boxed{\\text{(B)}}", "B", 1),  # verl 0: brackets and \text say nothing
    ("boxed", "\\boxed{\\frac{1}{\\sqrt{\\frac{2}{3}}}}", "\\frac{1}{\\sqrt{\\frac{2}{3}}}", 1),
    ("boxed", "\\boxed{3} no, \\boxed{4}", "4", 1),
    ("boxed", "\\boxed{3} no, \\boxed{4}", "3", 0),
    ("boxed", "$\\boxed 5$", "5", 1),
    ("boxed", "\\fbox{5}", "5", 1),
    ("boxed", "\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", 1),
    ("boxed", "\\boxed{5\\text{ cm}}", "5", 1),
    ("boxed", "\\boxed{5 \\text{ cm}^2}", "5", 1),  # Hendrycks' rules 0: a unit may have a power
    ("boxed", "\\boxed{5", "5", 0),
    ("boxed", "\\boxed{}", "5", 0),
    ("boxed", "", "5", 0),
    ("boxed", "the answer is 5", "5", 0),
    (
        "boxed",
        "Answer: 41, that is \\boxed{42}",
        "42",
        1,
    ),  # verl's math_dapo -1: it stops at "Answer:"
    ("boxed", "\\boxed{x^2+2x+1}", "(x+1)^2", 0),  # text only: algebra is `math`
    ("boxed", "\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})", 1),
    ("boxed", "\\boxed{\\text{Evelyn}}", "\\text{Evelyn}", 1),
    ("boxed", "\\boxed{evelyn}", "\\text{Evelyn}", 1),
    ("boxed", "\\boxed{90}", "90^\\circ", 1),
    ("boxed", "\\boxed{\\$18.90}", "18.90", 1),
    ("boxed", "\\boxed{11\\sqrt2}", "11\\sqrt{2}", 1),
    ("boxed", "\\boxed{.5}", "0.5", 1),
    ("boxed", "\\boxed{3i+2}", "2+3i", 1),
    ("boxed", "\\boxed{-i + \\frac12}", "\\frac{1}{2}-i", 1),
    ("boxed", "\\boxed{3i-2}", "2+3i", 0),
    # ---- MATH, DeepMath, AIME, AMC, Minerva, OlympiadBench by algebra: cs336's lists
    ("math", "\\boxed{42.0}", "42", 1),
    ("math", "\\boxed{142}", "142.0", 1),  # AMC's file has floats
    ("math", "\\boxed{025}", "25", 1),  # AIME answers have three digits
    ("math", "\\boxed{1{,}000}", "1000", 1),
    ("math", "\\boxed{1 000}", "1000", 1),
    ("math", "\\boxed{50\\%}", "50", 1),
    ("math", "\\boxed{(1,2)}", "(1, 2)", 1),
    ("math", "\\boxed{1 and 2}", "1,2", 1),
    ("math", "\\boxed{x^2+2x+1}", "(x+1)^2", 1),
    ("math", "\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1),
    ("math", "\\boxed{90 degrees}", "90", 1),
    ("math", "\\boxed{10 cm}", "10", 1),
    ("math", "\\boxed{7 3/4}", "31/4", 1),
    ("math", "\\boxed{7\\frac{3}{4}}", "7.75", 1),
    ("math", "\\boxed{Even}", "\\text{even}", 1),
    ("math", "\\boxed{1e3}", "1000", 1),
    (
        "math",
        "\\boxed{\\begin{bmatrix}1\\\\2\\end{bmatrix}}",
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        1,
    ),
    ("math", "\\boxed{(1,2)\\cup(3,4)}", "(3,4)\\cup(1,2)", 1),
    ("math", "\\boxed{4i+3}", "3+4i", 1),
    ("math", "\\boxed{2/4}", "1/2", 1),  # cs336's fast grader 0
    ("math", "\\boxed{2^{10}}", "1024", 1),
    ("math", "\\boxed{\\{1,2\\}}", "2,1", 1),
    ("math", "\\boxed{0.3333333333}", "1/3", 1),
    ("math", "\\boxed{2x+1=y}", "y=2x+1", 1),
    ("math", "\\boxed{[-2,7]}", "x \\in [-2,7]", 1),
    ("math", "\\boxed{4:3}", "4/3", 1),
    (
        "math",
        "\\boxed{10\\%}",
        "0.1",
        1,
    ),  # depends on the antlr runtime in math-verify; ours does not
    ("math", "\\boxed{5 dollars}", "5", 1),  # cs336 0
    ("math", "\\boxed{1\\,000}", "1000", 1),  # cs336 0
    ("math", "\\boxed{1.5\\times10^3}", "1500", 1),
    ("math", "\\boxed{\\frac{\\sqrt{3}}{3}}", "\\frac{1}{\\sqrt{3}}", 1),
    ("math", "\\boxed{2\\pi/4}", "\\frac{\\pi}{2}", 1),
    ("math", "\\boxed{p-q}", "-q+p", 1),
    ("math", "\\boxed{\\infty}", "\\infty", 1),
    ("math", "\\boxed{Yes}", "\\text{Yes}", 1),  # a fifth of DeepMath's answers
    ("math", "\\boxed{\\text{True}}", "True", 1),
    ("math", "\\boxed{2516_8}", "2516_8", 1),
    ("math", "\\boxed{3, 5, 7}", "3,5,7", 1),
    ("math", "\\boxed{2516_{8}}", "2516_8", 1),
    ("math", "\\boxed{a_{1}}", "A_1", 0),
    ("math", "\\boxed{0.\\overline{36}}", "\\frac{4}{11}", 1),
    ("math", "\\boxed{\\frac{7}{6}}", "1.1\\overline{6}", 1),
    ("math", "\\boxed{-0.\\overline3}", "-\\frac13", 1),
    ("math", "\\boxed{0.\\overline{36}}", "0.36", 0),
    ("math", "\\boxed{\\varnothing}", "\\emptyset", 1),
    ("math", "\\boxed{\\mathbb R}", "\\mathbb{R}", 1),
    ("math", "\\boxed{42,}", "42", 1),  # cs336: with math-verify
    ("math", "\\boxed{5\\;}", "5", 1),
    ("math", "\\boxed{= 5}", "5", 1),
    ("math", "\\boxed{\\approx 3.5}", "3.5", 1),
    ("math", "\\boxed{x**2 + 1}", "1+x^2", 1),
    ("math", "\\boxed{x**3 + 1}", "1+x^2", 0),
    ("math", "\\boxed{2*pi/4}", "\\frac{\\pi}{2}", 1),
    ("math", "\\boxed{9**9**9**9}", "9", 0),
    ("math", "\\boxed{2sin(x)}", "2\\sin x", 1),
    (
        "math",
        "\\boxed{30\\text{ cm}}",
        "30 \\mathrm{~cm}",
        1,
    ),  # OpenR1-Math's and NuminaMath's units
    ("math", "\\boxed{24\\text{ cm}^2}", "24 \\mathrm{~cm}^{2}", 1),
    ("math", "\\boxed{24\\text{ cm}}", "24 \\mathrm{~cm}^{2}", 0),
    ("math", "\\boxed{30\\text{ mm}}", "30 \\mathrm{~cm}", 0),
    ("math", "\\boxed{[1,2]}", "[1;2]", 1),
    ("math", "\\boxed{(-\\infty,-1)\\cup(2,\\infty)}", "(-\\infty ;-1) \\cup (2 ;+\\infty)", 1),
    ("math", "\\boxed{(2,1)}", "(1;2)", 0),
    ("math", "\\boxed{\\big(3,-2\\big)}", "(3,-2)", 1),
    ("math", "\\boxed{10:30\\text{ a.m.}}", "10:30 a.m.", 1),
    ("math", "\\boxed{10:30\\text{ p.m.}}", "10:30 a.m.", 0),
    ("math", "\\boxed{C}", "C", 1),
    ("math", "\\boxed{1.6 \\times 10^{-19}}", "1.6e-19", 1),  # Minerva
    # rejected there and here
    ("math", "\\boxed{(2,1)}", "(1,2)", 0),
    ("math", "\\boxed{[1,2]}", "(1,2)", 0),
    ("math", "\\boxed{0.333}", "1/3", 0),
    ("math", "\\boxed{3.14159}", "\\pi", 0),
    ("math", "\\boxed{\\frac{2}{3}}", "0.6667", 0),
    ("math", "\\boxed{72 clips}", "72", 0),
    ("math", "\\boxed{10 m/s}", "10", 0),
    ("math", "\\boxed{1,23}", "123", 0),
    ("math", "\\boxed{five}", "5", 0),
    # the references' false positives
    ("math", "\\boxed{3 hours}", "3 minutes", 0),
    ("math", "\\boxed{5 m}", "5 km", 0),
    ("math", "\\boxed{5\\text{ million}}", "5", 0),
    ("math", "\\boxed{5\\text{ million}}", "5 million", 1),
    ("math", "\\boxed{x=5}", "y=5", 0),
    ("math", "\\boxed{a+1}", "c+1", 0),
    ("math", "\\boxed{(a,b)}", "(c,b)", 0),
    ("math", "\\boxed{no}", "on", 0),  # as products of letters they are equal
    ("math", "\\boxed{2516_7}", "2516_8", 0),
    ("math", "\\boxed{7 3/4}", "73/4", 0),
    ("math", "\\boxed{a+2b+3c=0}", "0", 0),  # math-verify takes the right side of any equation
    ("math", "\\boxed{A}", "A^T", 0),  # math-verify drops transposes and primes of letters
    ("math", "\\boxed{f(x)}", "f'(x)", 0),
    ("math", "\\boxed{k}", "k t", 0),  # and a last letter after a space, as a unit
    # near-misses: off by one, sign, other unit, other variable, other power, swapped, missing
    ("math", "\\boxed{41}", "42", 0),
    ("math", "\\boxed{-42}", "42", 0),
    ("math", "\\boxed{420}", "42", 0),
    ("math", "\\boxed{42\\%}", "0.043", 0),
    ("math", "\\boxed{\\frac{2}{1}}", "\\frac{1}{2}", 0),
    ("math", "\\boxed{\\sqrt{51}}", "\\sqrt{50}", 0),
    ("math", "\\boxed{3\\sqrt{2}}", "2\\sqrt{3}", 0),
    ("math", "\\boxed{2\\pi}", "\\pi^2", 0),
    ("math", "\\boxed{-\\frac{\\pi}{6}}", "\\frac{\\pi}{6}", 0),
    ("math", "\\boxed{12 feet}", "12\\text{ ft}^2", 0),
    ("math", "\\boxed{5 cm}", "5 mm", 0),
    ("math", "\\boxed{x+1}", "y+1", 0),
    ("math", "\\boxed{x^2+2x}", "(x+1)^2", 0),
    ("math", "\\boxed{3-4i}", "3+4i", 0),
    ("math", "\\boxed{1,2}", "1,2,3", 0),
    # lists without brackets are multisets; math-verify takes them as sets
    ("math", "\\boxed{1,1,2}", "2,1,1", 1),
    ("math", "\\boxed{1,1,2}", "1,2,2", 0),
    ("math", "\\boxed{1,1,2}", "1,2", 0),
    ("math", "\\boxed{1,\\frac22,2}", "1,2", 0),
    ("math", "\\boxed{1,1}", "1", 0),
    ("math", "\\boxed{\\{1,1,2\\}}", "\\{1,2\\}", 1),  # braces are a set
    ("math", "\\boxed{\\pm 3}", "3,-3", 1),
    ("math", "\\boxed{2,000, 1,000}", "1,000, 2,000", 1),
    ("math", "\\boxed{\\sqrt{2}, -\\sqrt{2}}", "-\\sqrt2, \\sqrt2", 1),
    ("math", "\\boxed{(-\\infty, 2)}", "(-\\infty, 2]", 0),
    ("math", "\\boxed{x>3}", "x<3", 0),
    ("math", "\\boxed{No}", "Yes", 0),
    ("math", "\\boxed{9}", "Yes", 0),
    ("math", "\\boxed{B}", "C", 0),
    ("math", "\\boxed{-\\infty}", "\\infty", 0),
    ("math", "\\boxed{1.0}", "1.1", 0),
    ("math", "\\boxed{1001_2}", "1001", 0),
    ("math", "\\boxed{1.7 \\times 10^{-19}}", "1.6e-19", 0),
    ("math", "42", "42", 0),  # no box
    ("math", "\\boxed{42} \\boxed{", "42", 0),
    # ---- answers that are stated: DAPO's prompts, LUFFY's version 4
    ("math_answer", "So it goes.\nAnswer: 42", "42", 1),
    ("math_answer", "Answer: $\\frac{1}{2}$", "0.5", 1),
    ("math_answer", "**Answer:** 42", "42", 1),
    ("math_answer", "Answer: 41\nthat is \\boxed{42}", "42", 1),  # verl -1
    ("math_answer", "Answer: 41", "42", 0),
    ("math_answer", "no answer", "42", 0),
    ("math_answer", "The answer is 57", "57", 1),
    ("math_answer", "Answer: **42**", "42", 1),
    ("math_answer", "**Answer: 42**", "42", 1),
    ("math_answer", "The answer is: $$\\frac{3}{4}$$", "0.75", 1),
    ("math_answer", "Answer: 12 (which is 3 times 4)", "12", 1),
    ("math_answer", "Answer: 12, which is 3 times 4.", "12", 1),
    ("math_answer", "Answer: 12, 13", "12,13", 1),
    ("math_answer", "Answer: 12, 13", "12", 0),
    ("math_answer", "The answer is approximately 3.5", "3.5", 1),
    ("math_answer", "The answer is therefore $x^2$.", "x^2", 1),
    ("math_answer", "**Final Answer**\n\n$x^2$", "x^2", 1),
    ("math_answer", "**Answer**: $x^2$", "x^2", 1),
    ("math_answer", "The **answer** is $x^2$", "x^2", 1),
    ("math_answer", "The answer is $\\frac12$ or $\\frac13$.", "0.5", 0),
    ("math_answer", "The answer is $2$ and $3$.", "2,3", 1),
    ("math_answer", "The answer is $x=5$, where $y=3$.", "5", 1),
    ("math_answer", "The answer is 1.5 million", "1.5", 0),
    ("math_answer", "Answer: 3 times 4", "3", 0),
    ("math_answer", "Answer: 3 times", "3", 1),
    ("math_answer", "Answer: 12 to the nearest integer", "12", 1),
    # ---- OAT-style evaluation
    ("oat", "thought \\boxed{1} </think> so \\boxed{2}", "2", 1),
    ("oat", "thought \\boxed{2} </think> so it is", "2", 0),
    ("oat", "\\boxed{2}", "2", 1),  # accepted without the tag, unlike in training
    ("oat", "</think> The answer is 2", "2", 0),  # the box is required
    ("oat", "</think> \\boxed{\\frac{4}{2}}", "2", 1),
    # ---- LUFFY's T11
    ("think_math", "x </think> \\boxed{\\frac12}", "0.5", 1),
    ("think_math", "x \\boxed{5}", "5", 0),
    ("think_math", "x \\boxed{5} </think> done", "5", 0),
    ("think_math", "x </think> b \\boxed{3} </think> \\boxed{4}", "3", 1),
    ("think_math", "x </think> b \\boxed{3} </think> \\boxed{4}", "4", 0),
    ("think_math", "x </think> The answer is 57", "57", 1),
    ("think_math", "x </think> \\boxed{57}", "$57$", 1),
    ("think_math", "x </think> \\boxed{A}", "A", 1),
    ("think_math", "x </think> \\boxed{\\text{A}}", "A", 1),
    (
        "think_math",
        "x </think> ANSWER: A",
        "A",
        1,
    ),  # the reference 0, though its prompts ask for this form
    ("think_math", "x </think> \\boxed{1,2}", "2,1", 1),
    ("think_math", "x </think> \\boxed{x=5}", "5", 1),
    # ---- multiple choice: MMLU, MMLU-Pro, GPQA, ARC
    ("choice", "B is correct.", "B", 1),
    ("choice", "Option (B) is the correct answer.", "B", 1),
    ("choice", "A is wrong, so B is correct.", "B", 1),
    ("choice", "A is wrong, so B is correct.", "A", 0),
    ("choice", "(B)", "B", 1),
    ("choice", "ANSWER: B", "B", 1),
    ("choice", "Answer: **B**", "B", 1),
    ("choice", "**Answer**: B", "B", 1),
    ("choice", "**Final Answer**: A", "A", 1),
    ("choice", "\\boxed{B}", "B", 1),
    ("choice", "\\boxed{\\text{B}}", "B", 1),
    ("choice", "\\boxed{\\text{(B)}}", "B", 1),
    ("choice", "\\boxed{(B)\\ 42}", "C", 0),
    ("choice", "The correct answer is B. There is more.", "B", 1),
    ("choice", "The answer is (A). No. Therefore, the answer is (C)", "C", 1),  # Classmate 8.10
    ("choice", "The answer is (A). No. Therefore, the answer is (C)", "A", 0),
    (
        "choice",
        "I think (D) or (A)",
        "D",
        0,
    ),  # Classmate 8.10 takes the first; naming two is no choice
    ("choice", "none", "A", 0),
    ("choice", "A long story.", "A", 0),
    ("choice", "The answer is A man of letters", "A", 0),
    ("choice", "The answer is not B", "B", 0),
    ("choice", "\\boxed{J}", "J", 1),  # MMLU-Pro
    ("choice", "The answer is 2.", "2", 1),  # some ARC questions have digits
    ("choice", "The answer is 2.5", "2", 0),
    ("choice", "C", "B", 0),
    ("choice", "t </think> <answer>B</answer>", "B", 1),
    ("choice", "The answer is \\(B\\)", "B", 1),
    ("choice", 'The answer is "B".', "B", 1),
    ("choice", "The answer is `B`", "B", 1),
    ("choice", "The answer is therefore B.", "B", 1),
    ("choice", "### Final Answer\nB", "B", 1),
    ("choice", "Option B", "B", 1),
    ("choice", "**B**. Paris", "B", 1),
    ("choice", "**B.** Paris", "B", 1),
    ("choice", "The answer is A because B is too small.", "A", 1),
    ("choice", "The answer is A, since B is too small.", "A", 1),
    ("choice", "(A) (B) (C) (D)", "A", 0),  # all of them is no choice
    ("choice", "(A) or (B)", "A", 0),
    ("choice", "The answer is A or B.", "A", 0),
    ("choice", "The answer is B or C", "B", 0),
    ("choice", "The answer is A, B and C", "A", 0),
    ("choice", "The answer is (B), (C) or (D).", "B", 0),
    ("choice", "The answer is (B) (C)", "B", 0),
    ("choice", "The answer is B and C is wrong.", "B", 1),
    ("choice", "The answer is B.\n\nC is wrong.", "B", 1),
    # ---- R1-Zero's classes, by text and by algebra
    ("r1_zero", TAGS.format("42"), "42", 1),
    ("r1_zero", "t </think>\n<answer>42</answer>", "42", 1),
    ("r1_zero", TAGS.format("\\boxed{42}"), "42", 1),
    ("r1_zero", TAGS.format("41"), "42", 0),
    ("r1_zero", "t </think><answer>42</answer>", "42", 0),
    ("r1_zero", "t </think>  <answer>42</answer>", "42", 0),
    (
        "r1_zero",
        "</answer></think> <answer>42",
        "42",
        0,
    ),  # cs336 1: it does not look at the order of the tags
    (
        "r1_zero",
        TAGS.format("42") + " 41",
        "42",
        1,
    ),  # cs336's fast grader reads on after the closing tag
    ("r1_zero", "\\boxed{42}", "42", 0),
    ("r1_zero", TAGS.format("2^3"), "8", 0),  # as in the course: an integer is not computed
    ("r1_zero_math", TAGS.format("2^3"), "8", 1),
    ("r1_zero_math", TAGS.format("She sold 72 clips."), "72", 1),
    ("r1_zero", TAGS.format("She sold 72 clips."), "72", 0),  # as the course's fast mode
    ("r1_zero_math", TAGS.format("She sold 72 clips in 3 days."), "72", 0),  # the last number
    ("r1_zero_math", TAGS.format("72 clips"), "72", 0),
    ("question_only", "\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1),
    ("question_only", "\\boxed{(x+1)^2}", "x^2+2x+1", 1),
    ("question_only", "\\boxed{(x+1)^2}", "x^2+2x+2", 0),
    ("question_only", "\\sqrt{8}", "2\\sqrt{2}", 0),
    ("r1_zero_math", TAGS.format("The answer is 8"), "8", 1),
    ("r1_zero_math", "<answer>8</answer>", "8", 0),
    ("r1_zero_math", TAGS.format("9"), "8", 0),
    # ---- search: verl's T10
    ("search", "<answer>The Paris!</answer>", "paris", 1),
    ("search", "<answer>Paris</answer>", '["Paris", "City of Light"]', 1),
    ("search", "<answer>city of light</answer>", '{"target": ["Paris", "City of Light"]}', 1),
    ("search", "<answer>London</answer> <answer>Paris</answer>", "Paris", 1),
    ("search", "<answer>Paris</answer> <answer>London</answer>", "Paris", 0),
    ("search", "<answer>London</answer>", "Paris", 0),
    ("search", "Paris", "Paris", 0),
    ("search", "<answer>Paris", "Paris", 0),
    ("search", "<answer></answer>", "Paris", 0),
    # ---- geometry3k: 0.9 for the answer and 0.1 for the form
    ("geometry3k", "<think>t</think> \\boxed{12}", "12", 1.0),
    ("geometry3k", "\\boxed{12}", "12", 0.9),
    ("geometry3k", "<think>t</think> \\boxed{13}", "12", 0.1),
    ("geometry3k", "12", "12", 0.0),
    # ---- form and length
    ("format", TAGS.format("anything"), "42", 1),
    ("format", "<answer>42</answer>", "42", 0),
    ("box_format", "\\boxed{anything}", "42", 1),
    ("box_format", "\\boxed{}", "42", 0),
    ("box_format", "\\boxed{42", "42", 0),
    ("think_format", "<think>t</think> 42", "42", 1),
    ("think_format", "t</think> 42", "42", 1),  # the template may have opened the thought
    ("think_format", "<think>t", "42", 0),
    ("think_format", "<think>t</think>", "42", 0),
    ("think_format", "<think>t</think> 42 </think> 43", "42", 0),
    ("think_format", "42", "42", 0),
    ("bold", "**a** and **b c** but not ** d", "42", 2),
    ("length(limit=8)", "four", "42", 0.5),
    ("length(limit=8)", "much more than that", "42", 1),
    # verl's T9: M=20, B=4
    ("overlong(limit=20, buffer=4)", "x" * 16, "42", 0),
    ("overlong(limit=20, buffer=4)", "x" * 17, "42", -0.25),
    ("overlong(limit=20, buffer=4)", "x" * 18, "42", -0.5),
    ("overlong(limit=20, buffer=4)", "x" * 20, "42", -1),
    ("overlong(limit=20, buffer=4)", "x" * 30, "42", -1),
    # ---- sums
    ("math + 0.1*format", TAGS.format("\\boxed{8}"), "8", 1.1),
    ("math + 0.1*format", "\\boxed{8}", "8", 1.0),
    ("math + 0.1*format", TAGS.format("\\boxed{9}"), "8", 0.1),
    ("2*math_answer - 1", "Answer: 42", "42", 1),  # verl's math_dapo: +1 and -1
    ("2*math_answer - 1", "Answer: 41", "42", -1),
    ("2*math_answer - 1", "no answer", "42", -1),
    (
        "1.5*think_math + 0.5*think_math.format - 1",
        "x </think> \\boxed{5}",
        "5",
        1,
    ),  # LUFFY's version 1: right
    ("1.5*think_math + 0.5*think_math.format - 1", "x </think> \\boxed{6}", "5", -0.5),  # wrong
    ("1.5*think_math + 0.5*think_math.format - 1", "\\boxed{5}", "5", -1),  # bad form
    ("boxed.format", "\\boxed{6}", "5", 1),
]


# The sandbox, an environment or another package gives their scores; they have tests of their own.
SCORED_ELSEWHERE = {"code", "environment", "reasoning_gym"}


def test_the_table_covers_every_verifier_that_reads_text():
    verifiers = Counter(row[0].split(".")[0].split("(")[0] for row in TABLE)
    assert len(TABLE) >= 150
    assert set(VERIFIERS) - SCORED_ELSEWHERE <= set(verifiers)
    assert len(set(TABLE)) == len(TABLE), "a row stands there twice"


@pytest.mark.slow
def test_every_row_of_the_table(math_pool):
    items = [(response, Problem("p", (), truth)) for _, response, truth, _ in TABLE]
    results = math_pool.verify(items, [row[0] for row in TABLE])
    wrong = [
        (verifier, response, truth, expected, result)
        for (verifier, response, truth, expected), result in zip(TABLE, results, strict=True)
        if not isinstance(result, Score) or result.value != pytest.approx(expected, abs=1e-12)
    ]
    assert wrong == [], "\n".join(map(str, wrong))


# The course's lists, from its own grader: (answer, truth), right in both of its modes, ...
BOTH_MODES = [
    ("42.0", "42"),
    ("1/2", "0.5"),
    ("\\frac12", "1/2"),
    ("\\dfrac12", "\\frac{1}{2}"),
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    ("1 000", "1000"),
    ("$5", "5"),
    ("50%", "50"),
    ("x=5", "5"),
    ("(1,2)", "(1, 2)"),
    ("1 and 2", "1,2"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x^{2}+2x+1", "(x+1)^{2}"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("(\\sqrt{8}, 1)", "(2\\sqrt{2},1)"),
    ("90^\\circ", "90"),
    ("90 degrees", "90"),
    ("10 cm", "10"),
    ("7 3/4", "31/4"),
    ("7 3/4", "7.75"),
    ("\\text{even}", "even"),
    ("Even", "even"),
    ("(A)", "A"),
    ("1e3", "1000"),
    ("\\begin{bmatrix}1\\\\2\\end{bmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("(1,2)\\cup(3,4)", "(1,2)\\cup(3,4)"),
    ("4i+3", "3+4i"),
    ("42.", "42"),
    ("\\(42\\)", "42"),
]
# ... right with math-verify only (of these, ours takes numbers that are equal in both modes), ...
SLOW_MODE = [
    ("2^3", "8"),
    ("2^{10}", "1024"),
    ("2\\cdot3", "6"),
    ("\\{1,2\\}", "2,1"),
    ("2,1", "1,2"),
    ("0.3333333333", "1/3"),
    ("abc=5", "5"),
    ("y=2x+1", "2x+1=y"),
    ("x\\in[-2,7]", "[-2,7]"),
    ("So 48+24 = 72 clips were sold.", "72"),
]
SLOW_MODE_THERE = [
    ("2/4", "1/2"),
    ("6/2", "3"),
    ("0.5", "50\\%"),
    ("The answer is 72", "72"),
    ("**42**", "42"),
    ("42,", "42"),
    ("4:3", "4/3"),
]
# ... and wrong in both.
NO_MODE = [
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("0.333", "1/3"),
    ("3.14159", "\\pi"),
    ("\\frac23", "0.6667"),
    ("72 clips", "72"),
    ("10 m/s", "10"),
    ("1,23", "123"),
    ("five", "5"),
    ("x^2+2x", "(x+1)^2"),
    ("x^2+y^2+z^2-1", "z^2+y^2+x^2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pairs", "fast", "slow"),
    [(BOTH_MODES, 1, 1), (SLOW_MODE, 0, 1), (SLOW_MODE_THERE, None, 1), (NO_MODE, 0, 0)],
    ids=["both", "slow", "slow there", "none"],
)
def test_the_modes_of_the_course(grade, pairs, fast, slow):
    tagged = [(TAGS.format(answer), truth) for answer, truth in pairs]
    fast_scores = grade("r1_zero", tagged)
    slow_scores = grade("r1_zero_math", tagged)
    if fast is not None:
        assert [pair for pair, score in zip(pairs, fast_scores, strict=True) if score != fast] == []
    assert [pair for pair, score in zip(pairs, slow_scores, strict=True) if score != slow] == []
    assert all(map(float.__le__, fast_scores, slow_scores)), "right in fast mode, wrong in slow"


def test_four_classes_are_named_parts(math_pool):
    responses = [TAGS.format("8"), TAGS.format("9"), "<answer>8</answer>", "nothing"]
    for verifier in ("r1_zero", "r1_zero_math"):
        results = math_pool.verify(
            [(response, Problem("p", (), "8")) for response in responses], [verifier] * 4
        )
        assert [(r.parts["format"], r.parts["answer"]) for r in results] == [
            (1, 1),
            (1, 0),
            (0, 1),
            (0, 0),
        ]


@pytest.mark.parametrize(
    "verifier",
    [name for name in VERIFIERS if name not in ("format", "box_format", "think_format", "bold")],
)
def test_an_empty_ground_truth_is_a_failure(verifier, math_pool):
    """It is no wrong answer; verifiers that read no ground truth give a score."""
    (result,) = math_pool.verify([("\\boxed{8} #### 8", Problem("p", (), " "))], [verifier])
    reads = verifier not in ("length", "overlong")
    assert isinstance(result, Failure) is reads, (verifier, result)


def test_forms_of_code_tests():
    from postgrad.verifiers.grading.code import suite_of

    asserts = suite_of(Problem("p", (), json.dumps(["assert f(1) == 2"])))
    assert asserts is not None and asserts.asserts == ("assert f(1) == 2",)
    pairs = suite_of(Problem("p", (), "", extra={"tests": [{"input": "1\n", "output": "2\n"}]}))
    assert pairs is not None and pairs.stdio == ({"input": "1\n", "output": "2\n"},)
    apps = suite_of(Problem("p", (), json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})))
    assert apps is not None and apps.stdio == ({"input": "1\n", "output": "2\n"},)
    mbpp = suite_of(
        Problem(
            "p", (), "", extra={"test_list": ["assert f(1) == 2"], "test_imports": ["import math"]}
        )
    )
    assert mbpp is not None and "import math" in mbpp.setup
    humaneval = suite_of(
        Problem(
            "p",
            (),
            "",
            extra={"test": "def check(c): ...", "entry_point": "f", "prompt": "def f(x):\n"},
        )
    )
    assert humaneval is not None and humaneval.asserts[0].endswith("check(f)")
    plain = suite_of(Problem("p", (), "assert f(1) == 2\nassert f(2) == 3"))
    assert plain is not None and len(plain.asserts) == 1
    unpaired = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n"]})
    assert suite_of(Problem("p", (), unpaired)) is None
    assert suite_of(Problem("p", (), "42")) is None and suite_of(Problem("p", (), "[]")) is None


def test_program_of_an_indented_block_loses_the_indentation_of_its_fence():
    from postgrad.verifiers.grading.code import find_program

    item = "1. Here:\n   ```python\n   def f(x):\n       return x\n\n   ```\n"
    assert find_program(item) == ("def f(x):\n    return x", True)
    continued = "```python\n    return x\n```"  # a continuation of HumanEval's prompt
    assert find_program(continued) == ("    return x", True)
