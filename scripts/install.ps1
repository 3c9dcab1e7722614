# Install lora_fp8 on Windows 10 or 11 into a virtual environment of its own. Run it by double-clicking install.bat, or:
#
#   powershell -ExecutionPolicy Bypass -File scripts\install.ps1
#   powershell -ExecutionPolicy Bypass -File scripts\install.ps1 -Mirror cn
#
#   -Dir DIR        where .venv and start-ui.bat are made (default: this checkout)
#   -Package WHAT   what to install: a wheel, a folder or a name (default: this checkout)
#   -Extras LIST    optional parts (default: ui,video,heic,tagger)
#   -Torch BACKEND  auto (default), cpu, cu126, cu128, cu130, ...; PyPI's own build for Windows has no CUDA
#   -Mirror cn      mirrors in mainland China for Python packages and for Hugging Face
#   -Python PYTHON  the Python to use (default: 3.13, 3.12, 3.11 or 3.14)
[CmdletBinding()]
param(
    [string]$Dir = "",
    [string]$Package = "",
    [string]$Extras = "ui,video,heic,tagger",
    [string]$Torch = "auto",
    [ValidateSet("", "cn")]
    [string]$Mirror = "",
    [string]$Python = ""
)
Set-StrictMode -Version Latest
$ErrorActionPreference = "Stop"

function Stop-Install([string]$Sentence) {
    Write-Host "install.ps1: $Sentence" -ForegroundColor Red
    exit 2
}

function Invoke-Checked([string]$Program, [string[]]$Arguments) {
    & $Program @Arguments
    if ($LASTEXITCODE -ne 0) {
        Stop-Install "$Program $($Arguments -join ' ') ended with code $LASTEXITCODE; see its message above"
    }
}

function Test-Python([string[]]$Command) {
    # The "python" of the Microsoft Store is a stub that prints an advertisement and fails.
    $rest = @()
    if ($Command.Count -gt 1) { $rest = @($Command[1..($Command.Count - 1)]) }
    try {
        & $Command[0] @rest -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) or sys.maxsize < 2**32)" 2>$null | Out-Null
        return $LASTEXITCODE -eq 0
    }
    catch {
        return $false
    }
}

$here = Split-Path -Parent $PSScriptRoot
if ($Dir -eq "") { $Dir = $here }
if ($Package -eq "") { $Package = $here }

# --- Python

$candidates = @(@("py", "-3.13"), @("py", "-3.12"), @("py", "-3.11"), @("py", "-3.14"), @("python"), @("python3"))
if ($Python -ne "") { $candidates = @(, @($Python)) }
$found = $null
foreach ($candidate in $candidates) {
    if (Test-Python $candidate) {
        $found = @($candidate)
        break
    }
}
if ($null -eq $found) {
    Stop-Install "64-bit Python 3.11 to 3.14 is needed: winget install Python.Python.3.12, then open a new window"
}

# --- mirrors

if ($Mirror -eq "cn") {
    if (-not $Env:PIP_INDEX_URL) { $Env:PIP_INDEX_URL = "https://pypi.tuna.tsinghua.edu.cn/simple" }
    if (-not $Env:UV_DEFAULT_INDEX) { $Env:UV_DEFAULT_INDEX = "https://pypi.tuna.tsinghua.edu.cn/simple" }
    if (-not $Env:HF_ENDPOINT) { $Env:HF_ENDPOINT = "https://hf-mirror.com" }
}

# --- what this machine has

$gpu = ""
if (Get-Command nvidia-smi -ErrorAction SilentlyContinue) {
    $gpu = (& nvidia-smi "--query-gpu=name" "--format=csv,noheader") -join "; "
}
if ($gpu) {
    Write-Host "== GPU: $gpu"
}
else {
    Write-Host "== no NVIDIA GPU seen (nvidia-smi is missing or fails): training runs on the CPU, for miniatures only"
}
$longPaths = Get-ItemProperty -Path "HKLM:\SYSTEM\CurrentControlSet\Control\FileSystem" -Name LongPathsEnabled -ErrorAction SilentlyContinue
if ($null -eq $longPaths -or $longPaths.LongPathsEnabled -ne 1) {
    Write-Host "== Windows refuses paths of more than 260 characters here. Keep this folder's path short, or, as administrator:"
    Write-Host "   reg add HKLM\SYSTEM\CurrentControlSet\Control\FileSystem /v LongPathsEnabled /t REG_DWORD /d 1 /f"
}

# --- install

New-Item -ItemType Directory -Force -Path $Dir | Out-Null
$Dir = (Resolve-Path $Dir).Path
$venv = Join-Path $Dir ".venv"
$venvPython = Join-Path $venv "Scripts\python.exe"
$uv = Join-Path $venv "Scripts\uv.exe"
Write-Host "== $venv; torch: $Torch"
if (-not (Test-Path $venvPython)) {
    $rest = @()
    if ($found.Count -gt 1) { $rest = @($found[1..($found.Count - 1)]) }
    Invoke-Checked $found[0] ($rest + @("-m", "venv", $venv))
}
Invoke-Checked $venvPython @("-m", "pip", "install", "--quiet", "--upgrade", "pip", "uv")
$arguments = @("pip", "install", "--python", $venvPython)
$constraints = Join-Path $here "constraints.txt"
if (Test-Path $constraints) { $arguments += @("-c", $constraints) }
if ($Torch -ne "pypi") { $arguments += @("--torch-backend", $Torch) }
if ($Package -eq $here) { $arguments += "-e" }
$arguments += "$Package[$Extras]"
Invoke-Checked $uv $arguments

$program = Join-Path $venv "Scripts\lora-fp8.exe"
$lines = @("@echo off", "rem Open the page of lora_fp8. Its options are those of ""lora-fp8 ui"".", "chcp 65001 >nul", "set PYTHONUTF8=1")
if ($Env:HF_ENDPOINT) { $lines += "if not defined HF_ENDPOINT set HF_ENDPOINT=$($Env:HF_ENDPOINT)" }
$lines += @("""%~dp0.venv\Scripts\lora-fp8.exe"" ui --open %*", "if errorlevel 1 pause")
$lines | Set-Content -Encoding ASCII -Path (Join-Path $Dir "start-ui.bat")

Invoke-Checked $venvPython @("-c", "import torch; print('== torch', torch.__version__ + ':', torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'no CUDA GPU usable, the CPU is used')")
Write-Host "== installed. Next:"
Write-Host "   $(Join-Path $Dir 'start-ui.bat')    the page, at http://127.0.0.1:7860/"
Write-Host "   $program demo    train the bundled miniature, a few minutes on a CPU"
